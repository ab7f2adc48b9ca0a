"""Steps as traced graphs: tracing, graph passes, CUDA graphs, streams."""

"""Trackers: callbacks that send the metrics of runs to TensorBoard, MLflow or Weights & Biases."""

TRACKERS = ("tensorboard", "mlflow", "wandb")  # names on the command line

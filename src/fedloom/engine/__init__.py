"""Who loops: rounds, clients, epochs, batches. An engine imports no method."""

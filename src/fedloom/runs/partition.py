"""The partition of a run as a table."""

import numpy as np
import pyarrow as pa

from fedloom.core.federation import Federation


def partition_table(data: Federation) -> pa.Table:
    """One row per client: rows of the data set for training, validation and test, and the samples per class. The
    server's data is client -1; those that do not test the global model are in `train`."""
    clients = np.arange(data.clients + data.held_out)
    splits = {name: (rows.starts, rows.flat.cpu().numpy()) for name, rows in data.splits.items()}
    labels = data.labels()
    if data.server is not None:
        clients = np.append(clients, -1)
        assert data.server_test is not None
        test = data.server_test.cpu().numpy()
        of_server = {"train": np.setdiff1d(data.server.cpu().numpy(), test), "val": test[:0], "test": test}
        for name, (starts, flat) in splits.items():
            rows = of_server[name]
            splits[name] = np.append(starts, starts[-1] + len(rows)), np.concatenate([flat, rows])
        labels = np.vstack([labels, data.labels_of(data.server)])
    columns = {
        name: pa.ListArray.from_arrays(pa.array(a.astype(np.int32)), pa.array(b)) for name, (a, b) in splits.items()
    }
    width = pa.array(np.arange(0, labels.size + 1, data.classes, dtype=np.int32))
    columns["labels"] = pa.ListArray.from_arrays(width, pa.array(labels.reshape(-1)))
    if data.held_out:
        columns["held_out"] = pa.array(clients >= data.clients)
    return pa.table({"client": clients, **columns})

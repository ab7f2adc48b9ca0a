"""Private state of all clients, a row each; a round touches the rows of its cohort only."""

from __future__ import annotations

import torch
from torch import Tensor

from fedloom.core.tree import Tree, take, tree_map


class Store:
    def __init__(self, rows: Tree, clients: int) -> None:
        self.rows = rows  # stacked over clients
        self.trained = torch.zeros(clients, dtype=torch.int64)  # participations so far

    def read(self, ids: Tensor) -> Tree:
        return take(self.rows, ids)

    def write(self, ids: Tensor, rows: Tree) -> None:
        tree_map(lambda mine, new: mine.index_copy_(0, ids, new), self.rows, rows)
        self.trained[ids.cpu()] += 1

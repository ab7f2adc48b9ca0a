"""Rounds of training and evaluation: the server's driver, the clients, executors, traced graphs, planning."""

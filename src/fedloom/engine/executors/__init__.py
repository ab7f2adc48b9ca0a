"""Executors: they compute what the clients of a cohort do, one after another or stacked."""

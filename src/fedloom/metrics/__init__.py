"""Metrics over clients, and leaderboards of several runs."""

"""Run directories: records, checkpoints, folders and their locks."""

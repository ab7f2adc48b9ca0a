"""What a run leaves on disk, and how it is picked up again."""

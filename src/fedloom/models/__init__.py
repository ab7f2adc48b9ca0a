"""Model architectures by name, with the names that papers use in their experiments."""

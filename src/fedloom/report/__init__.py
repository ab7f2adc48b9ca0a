"""Results as tables (text) and plots (image files)."""

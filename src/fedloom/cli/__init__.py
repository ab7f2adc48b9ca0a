"""The command line. Nothing else prints."""

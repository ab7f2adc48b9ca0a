"""The configuration of a run: settings, YAML files and presets, checking of names and values."""

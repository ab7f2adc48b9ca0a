"""Settings that belong together, as YAML files: a folder per paper."""

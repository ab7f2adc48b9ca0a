"""One file per method. A file that defines a named `Algorithm` is registered by being here."""

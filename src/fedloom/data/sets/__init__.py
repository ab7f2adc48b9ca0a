"""One file per data set; a file that defines a `Dataset` is registered by being here."""

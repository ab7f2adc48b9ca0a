"""Runs whose clients are at sites of their own: messages between a server and sites, and what each side keeps."""

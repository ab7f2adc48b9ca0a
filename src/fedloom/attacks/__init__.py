"""What a server that follows the protocol can learn about clients from what they upload, and from their models."""

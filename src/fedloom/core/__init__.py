"""The contract: what methods, engines and data share."""

"""Operations with weights per client, where PyTorch has no fast ones."""

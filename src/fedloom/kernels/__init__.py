"""Operations with weights of their own for every client, where PyTorch has none that is fast."""

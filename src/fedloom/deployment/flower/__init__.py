"""The federation on Flower: everything that imports Flower. It needs `pip install fedloom[flower]`."""

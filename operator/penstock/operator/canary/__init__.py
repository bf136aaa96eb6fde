"""Canaries: whether one does as well as the model whose traffic it shares, and what it gets of that traffic."""

"""Networks: named ones, and any nn.Module as one flat vector."""

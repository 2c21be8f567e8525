"""Train a small network on generated data, in a loop that belongs to the script.

Run it:  paceline launch --workers 2 examples/session_loop.py
Data:    generated here
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paceline as pl


def main() -> None:
    torch.manual_seed(0)
    inputs = torch.randn(8192, 20)
    labels = (inputs @ torch.randn(20, 4)).argmax(dim=1)
    data = TensorDataset(inputs, labels)
    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    session = pl.session(model, optimizer, policy=pl.sync(), batch_size=64)
    loader = DataLoader(data, batch_sampler=session.batches(data))
    for _ in range(2):
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            session.step(loss)
    print(f"final loss {nn.functional.cross_entropy(model(inputs), labels).item():.3f}")


if __name__ == "__main__":
    main()

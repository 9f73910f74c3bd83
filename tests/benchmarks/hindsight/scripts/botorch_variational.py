"""Fits a variational Gaussian process of BoTorch to batches of a loader."""

import torch
from botorch.fit import fit_gpytorch_mll
from botorch.models import SingleTaskVariationalGP
from gpytorch.mlls import VariationalELBO
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
inputs = torch.rand(4000, 4)
targets = inputs.sin().sum(dim=1, keepdim=True)
model = SingleTaskVariationalGP(train_X=inputs, train_Y=targets, inducing_points=32)
loss = VariationalELBO(model.likelihood, model.model, num_data=len(inputs))
loader = DataLoader(TensorDataset(inputs, targets.squeeze(-1)), batch_size=16, shuffle=True)
fit_gpytorch_mll(loss, data_loader=loader, optimizer_kwargs={"step_limit": 1000, "stopping_criterion": None})

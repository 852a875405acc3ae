"""One thread a test process: the tensors here are small, and workers share the cores."""

import torch

torch.set_num_threads(1)

"""One thread a test process: the tensors here are small, and workers share the cores."""

import os
import tempfile

import torch

# The key with which runs are signed is the user's own; tests have one of theirs.
os.environ["XDG_STATE_HOME"] = tempfile.mkdtemp(prefix="crepe-tests-")

torch.set_num_threads(1)

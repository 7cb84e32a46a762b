"""Settings for all tests: no time limit decides, and hypothesis tries the same examples every time.

One thread each, here and in processes that tests start: the tensors are small, and threads that wait for one another
make a suite on a busy machine ten times slower.
"""

import os

import torch
from hypothesis import HealthCheck, settings

os.environ["OMP_NUM_THREADS"] = "1"
torch.set_num_threads(1)

settings.register_profile("repeatable", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("repeatable")

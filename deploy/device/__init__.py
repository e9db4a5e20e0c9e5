"""The checks behind `deploy.gpu_check`: real parts on a device, models with random weights."""

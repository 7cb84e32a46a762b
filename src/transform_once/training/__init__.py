"""The training loop, its objectives, optimisers and run folders."""

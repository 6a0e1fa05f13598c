"""Stand-in for torchvision on a host declared CPU-only; it has no dist-info, so transformers sees no torchvision."""

"""Canonical ops (`torch.ops.onboard.torch_*`) and the back ends that replace them."""

"""`jaxkfac analyze` of a pretrained model: gather, decompose, Lanczos, report."""

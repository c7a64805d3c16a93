"""`jaxkfac influence`: find the training texts that most influenced an answer."""

"""`jaxkfac influence`: which training texts an answer is owed to."""

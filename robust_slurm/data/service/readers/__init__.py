"""Processes that read and decode lanes for the data process, as many as the training needs."""

"""Drivers of vLLM. Each takes an iterator of requests and yields results as they finish."""

"""The router: takes HTTP requests, chooses a prefill and a decode node for each, and streams their tokens as text.

It holds no tensors and never loads torch. One asyncio loop runs everything but the tokenization of long prompts.
"""

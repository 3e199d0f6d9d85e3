"""Text and token ids: tokenizer, chat template, detokenizer, stop strings and stop patterns."""

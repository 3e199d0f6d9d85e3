"""Text to tokens and back: tokenizer, chat template, incremental detokenizing, stops."""

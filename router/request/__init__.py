"""The checked content of a request, the bounded queue, and the sequences of a request as they become text."""

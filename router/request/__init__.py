"""What one request asks for, checked, and its sequences as they become text."""

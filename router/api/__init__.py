"""The routes: both dialects, the fleet, live state, and the document that describes them."""

"""Cast, CastLike."""

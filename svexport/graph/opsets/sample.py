"""GridSample, AffineGrid, DeformConv."""

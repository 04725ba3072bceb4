// The launchers of deform_conv2d, which make fewer columns at a time: what small images are, whole or in pieces.
#define SVEXPORT_LEAST_COLUMNS (16 << 10)
#include "deform_conv2d/deform_conv2d.cu"

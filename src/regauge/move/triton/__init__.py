"""The kernels in Triton, for tiles that lie in a GPU's memory; needs the extra `triton`.

`schedule` lays a box out over programs (no Triton in it), `formats` holds the encoders and decoders, `kernels` the one
kernel that copies and converts, `run` launches it, `ahead` compiles it for GPUs that are not there.
"""

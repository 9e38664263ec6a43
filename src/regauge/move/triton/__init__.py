"""The kernels in Triton, for tiles that lie in a GPU's memory; needs the extra `triton`.

`schedule` lays a box out over programs (no Triton in it), `formats` holds the encoders and decoders, `kernels` those that
copy and convert, with scales that are given or computed, `hashing` the one that digests rows; `run` and `digest` launch them.
"""

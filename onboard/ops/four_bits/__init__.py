"""Linear layers with weights of four bits: integers and floats in words, two ways to read them."""

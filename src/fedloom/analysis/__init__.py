"""What trained models are like: loss landscapes and sharpness, features, and the terms of generalization bounds."""

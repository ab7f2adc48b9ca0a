"""The page of `fedloom report`: HTML, CSS and JavaScript, and Vega-Lite, which draws its charts."""

"""Run the fine-tuning recipe of NeMo Automodel like its own example does.

torchrun --nproc-per-node=8 tests/frameworks/recipes/train_automodel.py --config automodel.yaml
"""

from nemo_automodel.components.config._arg_parser import parse_args_and_load_config
from nemo_automodel.recipes.llm.train_ft import TrainFinetuneRecipeForNextTokenPrediction

if __name__ == "__main__":
    recipe = TrainFinetuneRecipeForNextTokenPrediction(parse_args_and_load_config())
    recipe.setup()
    recipe.run_train_validation_loop()

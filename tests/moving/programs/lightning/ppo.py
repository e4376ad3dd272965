"""The shape of Lightning's PPO: the loader plays the policy, and actor and critic train by hand."""

import lightning as L
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.distributions import Categorical
from torch.utils.data import DataLoader, IterableDataset


class ExperienceSourceDataset(IterableDataset):
    """What a function yields, anew in each epoch."""

    def __init__(self, generate_batch):
        self.generate_batch = generate_batch

    def __iter__(self):
        return self.generate_batch()


class PPOLightning(L.LightningModule):
    def __init__(
        self,
        gamma=0.95,
        lam=0.9,
        lr_actor=5e-3,
        lr_critic=1e-2,
        batch_size=8,
        steps_per_epoch=24,
        nb_optim_iters=2,
        clip_ratio=0.2,
    ):
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = False
        self.actor = nn.Sequential(nn.Linear(2, 12), nn.Tanh(), nn.Linear(12, 2))
        self.critic = nn.Sequential(nn.Linear(2, 12), nn.Tanh(), nn.Linear(12, 1))
        draw = torch.Generator().manual_seed(6)  # fixed, whoever seeds the generators of a run
        self.draws = iter(torch.rand(200, generator=draw).tolist())
        self.state = torch.tensor([0.5, 0.0])
        self.avg_reward = 0.0

    def forward(self, x):
        policy = Categorical(logits=self.actor(x))
        action = torch.tensor(int(policy.probs[0] < next(self.draws)))
        return policy, action, self.critic(x).squeeze(-1)

    def play(self, action):
        """Push a cart that should stay at the origin."""
        position, speed = self.state.tolist()
        speed += 0.1 if int(action) else -0.1
        position += speed
        reward = 1.0 - abs(position)
        if abs(position) > 1:
            position, speed = 0.5, 0.0
        self.state = torch.tensor([position, speed])
        return reward

    def generate_trajectory_samples(self):
        states, actions, logps, rewards, values = [], [], [], [], []
        with torch.no_grad():
            for _ in range(self.hparams.steps_per_epoch):
                state = self.state
                policy, action, value = self(state)
                states.append(state)
                actions.append(action)
                logps.append(policy.log_prob(action))
                values.append(float(value))
                rewards.append(self.play(action))
            values.append(float(self.critic(self.state)))
        advantage, qvals, advantages = 0.0, [], []
        for at in reversed(range(len(rewards))):
            delta = rewards[at] + self.hparams.gamma * values[at + 1] - values[at]
            advantage = delta + self.hparams.gamma * self.hparams.lam * advantage
            advantages.insert(0, advantage)
            qvals.insert(0, advantage + values[at])
        self.avg_reward = sum(rewards) / len(rewards)
        yield from zip(
            states, actions, logps, torch.tensor(qvals), torch.tensor(advantages), strict=True
        )

    def actor_loss(self, state, action, logp_old, adv):
        ratio = torch.exp(Categorical(logits=self.actor(state)).log_prob(action) - logp_old)
        clipped = torch.clamp(ratio, 1 - self.hparams.clip_ratio, 1 + self.hparams.clip_ratio)
        return -(torch.min(ratio * adv, clipped * adv)).mean()

    def critic_loss(self, state, qval):
        return (qval - self.critic(state).squeeze(-1)).pow(2).mean()

    def training_step(self, batch, batch_idx):
        state, action, old_logp, qval, adv = batch
        optimizer_actor, optimizer_critic = self.optimizers()
        adv = (adv - adv.mean()) / adv.std()
        self.log("avg_reward", self.avg_reward, prog_bar=True, on_step=False, on_epoch=True)
        for _ in range(self.hparams.nb_optim_iters):
            loss_actor = self.actor_loss(state, action, old_logp, adv)
            optimizer_actor.zero_grad()
            self.manual_backward(loss_actor)
            self.clip_gradients(optimizer_actor, 0.5, "norm")
            optimizer_actor.step()
            loss_critic = self.critic_loss(state, qval)
            optimizer_critic.zero_grad()
            self.manual_backward(loss_critic)
            optimizer_critic.step()
        self.log("loss_actor", loss_actor, on_step=True, on_epoch=False, prog_bar=True)
        self.log("loss_critic", loss_critic, on_step=True, on_epoch=False)

    def configure_optimizers(self):
        return (
            torch.optim.Adam(self.actor.parameters(), lr=self.hparams.lr_actor),
            torch.optim.Adam(self.critic.parameters(), lr=self.hparams.lr_critic),
        )

    def train_dataloader(self):
        dataset = ExperienceSourceDataset(self.generate_trajectory_samples)
        return DataLoader(dataset=dataset, batch_size=self.hparams.batch_size)


def main(folder):
    L.seed_everything(0)
    model = PPOLightning()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=4,
        logger=CSVLogger(folder),
        log_every_n_steps=1,
        enable_progress_bar=False,
        default_root_dir=folder,
    )
    trainer.fit(model)
    return model, {"state": model.state.tolist()}

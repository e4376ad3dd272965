"""The shape of Lightning's deep Q-network: the step plays, and the loader draws from that."""

from collections import deque, namedtuple

import lightning as L
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader
from torch.utils.data.dataset import IterableDataset

Experience = namedtuple("Experience", "state action reward done new_state")


class Corridor:
    """An environment: walk to the right end of a line."""

    def __init__(self, length=6):
        self.length = length

    def reset(self):
        self.at = self.length // 2
        return self._state()

    def _state(self):
        state = torch.zeros(self.length)
        state[self.at] = 1
        return state

    def step(self, action):
        self.at += 1 if action else -1
        done = self.at in (0, self.length - 1)
        return self._state(), float(self.at == self.length - 1), done


def tape(seed):
    """Numbers between 0 and 1, the same whoever seeds the generators of a run."""
    return iter(torch.rand(400, generator=torch.Generator().manual_seed(seed)).tolist())


class ReplayBuffer:
    def __init__(self, capacity):
        self.buffer = deque(maxlen=capacity)
        self.draws = tape(4)

    def __len__(self):
        return len(self.buffer)

    def append(self, experience):
        self.buffer.append(experience)

    def sample(self, batch_size):
        chosen = [int(next(self.draws) * len(self.buffer)) for _ in range(batch_size)]
        columns = zip(*(self.buffer[index] for index in chosen), strict=True)
        states, actions, rewards, dones, new_states = columns
        return (
            torch.stack(states),
            torch.tensor(actions),
            torch.tensor(rewards),
            torch.tensor(dones),
            torch.stack(new_states),
        )


class RLDataset(IterableDataset):
    def __init__(self, buffer, sample_size=20):
        self.buffer = buffer
        self.sample_size = sample_size

    def __iter__(self):
        yield from zip(*self.buffer.sample(self.sample_size), strict=True)


class DQNLightning(L.LightningModule):
    def __init__(self, lr=1e-2, gamma=0.9, sync_rate=4, warm_start_steps=24, batch_size=5):
        super().__init__()
        self.save_hyperparameters()
        self.env = Corridor()
        self.net = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2))
        self.target_net = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2))
        self.buffer = ReplayBuffer(100)
        self.draws = tape(5)
        self.state = self.env.reset()
        self.total_reward = 0.0
        self.episode_reward = 0.0
        for _ in range(self.hparams.warm_start_steps):
            self.play_step(epsilon=1.0)

    def forward(self, x):
        return self.net(x)

    @torch.no_grad()
    def play_step(self, epsilon=0.0):
        if next(self.draws) < epsilon:
            action = int(next(self.draws) > 0.5)
        else:
            action = int(self.net(self.state).argmax())
        new_state, reward, done = self.env.step(action)
        self.buffer.append(Experience(self.state, action, reward, done, new_state))
        self.state = self.env.reset() if done else new_state
        return reward, done

    def dqn_mse_loss(self, batch):
        states, actions, rewards, dones, next_states = batch
        values = self.net(states).gather(1, actions.long().unsqueeze(-1)).squeeze(-1)
        with torch.no_grad():
            following = self.target_net(next_states).max(1)[0]
            following[dones] = 0.0
        return nn.functional.mse_loss(values, following * self.hparams.gamma + rewards)

    def training_step(self, batch, nb_batch):
        epsilon = max(0.05, 1.0 - self.global_step / 20)
        reward, done = self.play_step(epsilon)
        self.episode_reward += reward
        loss = self.dqn_mse_loss(batch)
        if done:
            self.total_reward = self.episode_reward
            self.episode_reward = 0.0
        if self.global_step % self.hparams.sync_rate == 0:
            self.target_net.load_state_dict(self.net.state_dict())
        self.log_dict({"reward": reward, "train_loss": loss, "epsilon": epsilon})
        self.log("total_reward", torch.tensor(self.total_reward), prog_bar=True)
        return loss

    def configure_optimizers(self):
        return [torch.optim.Adam(self.net.parameters(), lr=self.hparams.lr)]

    def train_dataloader(self):
        return DataLoader(RLDataset(self.buffer), batch_size=self.hparams.batch_size)


def main(folder):
    L.seed_everything(4)
    model = DQNLightning()
    trainer = L.Trainer(
        accelerator="auto",
        devices=1,
        max_epochs=6,
        logger=CSVLogger(folder),
        log_every_n_steps=1,
        enable_progress_bar=False,
        default_root_dir=folder,
    )
    trainer.fit(model)
    return model, {"played": len(model.buffer), "updates": trainer.global_step}
